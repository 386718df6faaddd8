"""What is done inside torch programs: a forward pass listened to, sequence by sequence."""
