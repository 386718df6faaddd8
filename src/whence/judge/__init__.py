"""Numbers -> verdicts, with the noise budget that was applied."""
