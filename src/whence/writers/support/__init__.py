"""What several writers share."""
