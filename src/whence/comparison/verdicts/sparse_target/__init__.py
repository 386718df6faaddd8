"""A target that shows only some tensors: each is judged by those that it depends on."""
