"""The target's tensors in the reference's axes: fused calls taken apart, axes moved, channels in
order.
"""
