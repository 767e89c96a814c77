"""What a command does from its arguments to its result."""
