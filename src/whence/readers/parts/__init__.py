"""What several formats share: containers, encodings, limits. No reader is found here."""
