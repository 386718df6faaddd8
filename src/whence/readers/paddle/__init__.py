"""What several Paddle formats share."""
