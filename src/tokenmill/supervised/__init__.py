"""Rows that are more than one text: chats, prompts with completions, texts of several fields.

    a row's JSON -> conversation / template -> text, what of it counts -> pieces -> ids and mask

`sources` hands over each row as JSON, `engines` encode plain stretches of text; what is here joins
them. A *shaper* does it for a whole batch: `shape` gives the stretches to encode and the rows that
cannot be used, `assemble` puts ids and masks together. Both are functions of the row and the
configuration alone.
"""
