"""Raw text in: from the inputs that a user names to rows of text. `base` has the contract."""
