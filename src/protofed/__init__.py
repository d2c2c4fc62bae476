"""ProtoFed: private, continual web personalization."""
