"""Other projects' token formats, and the runs that write and read them.

    store -> Format.plan -> parts, on threads -> Format.finish         export
    files -> Format.open -> parts, on threads -> store                 imports

`base` is what a format must have, and lists them all. Formats of raw ids (`raw`) can be read where
they are (`in_place`): those with an index beside them (`indexed`), and those without (`nanogpt`).
Formats of rows (`records`) are `chunks`, `tables` and `tensors`.
"""
