"""Other tools under their own names: a script moves over by its import alone (docs/switching.md).

    from whence.compat.torch_xray import PrecisionDebugger

Each module is called as the tool's own is, and thin over what `import whence` offers. Importing one
loads no framework.
"""
