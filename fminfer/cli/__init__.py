"""The command line: commands, flags, help, exit statuses."""
