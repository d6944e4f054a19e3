"""Other projects' token formats: one module each, and the runs that write and read them.

    store -> Format.plan -> parts, in a pool -> Format.finish          export
    files -> Format.open -> parts, in a pool -> store                  import

`base` is what a format must have, `registry` lists them all.
"""
