"""Rows that are more than one text: chats, prompts with completions, texts of several fields.

    a row's JSON -> conversation / template -> text, ranges of it -> pieces -> ids and loss mask

`sources` hands over each row as JSON, `engines` encode plain texts; what is here joins them. A
*shaper* does it for a whole batch: `shape` gives the texts to encode and the rows that cannot be
used, `assemble` puts ids and masks together. Both are functions of the row and the configuration
alone.
"""
