"""Which call faces which: rules by falling strictness, on names, structure, data flow and
content.
"""
