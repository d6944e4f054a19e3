"""The `tokenmill` command: every command parses, calls one library function and renders."""
