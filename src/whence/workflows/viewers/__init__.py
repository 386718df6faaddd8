"""Shows a comparison in other viewers: Netron, Model Explorer and TensorBoard."""
