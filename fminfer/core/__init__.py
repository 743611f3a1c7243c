"""What every part of fminfer shares: errors, options, messages, versions."""
