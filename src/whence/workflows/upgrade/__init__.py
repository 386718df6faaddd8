"""What an upgrade changes: the same models under two releases, captured and compared."""
