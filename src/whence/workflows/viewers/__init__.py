"""A comparison where people look already: in Netron, Model Explorer and TensorBoard."""
