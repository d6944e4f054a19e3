"""The reference trainer: a store in, a trained model out, and a device that does not wait.

    options.py   what a run is told, the models as plain numbers, and `tokenmill.train`
    model.py     the model, AdamW, 8-bit AdamW, clipping, learning rates
    loop.py      Trainer: one step after the other, on any iterable of batches; what follows from
                 the options here, what it takes, and numbers that are read when they are there
    run.py       all of it together, with evaluation, metrics and checkpoints

Only options.py can be imported where torch is not installed.
"""
