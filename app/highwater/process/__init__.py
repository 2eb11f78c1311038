"""This process: its errors, files, secrets and certificates, its log, clocks and limits, and text from outside."""
