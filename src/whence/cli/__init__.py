"""Words -> api -> report -> exit code, one file a command."""
