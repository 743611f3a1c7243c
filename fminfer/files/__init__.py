"""Files in and out: lines, journals, claims, status, and storage behind URLs."""
