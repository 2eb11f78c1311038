"""What commands use to talk to a sidecar: the calls, the options that all share, the responses as values."""
