"""What several Ascend formats share."""
