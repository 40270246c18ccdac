"""The service behind the template `code-interpreter-v1`: runs code in kernels that keep their state, inside a sandbox.

It runs in the guest, on packages of its own (images/files/interpreter-service.in), and knows nothing of the rest of
Skerry. `zygote.py` and `kernel.py` run on the Python that the sandbox's users have.

    server      the HTTP interface, port 49999
    contexts    which contexts there are
    context     what a context is, whatever its language
    jupyter     contexts that are Jupyter kernels: Python, JavaScript, TypeScript
    bash        contexts that are shells
    life        which sandbox this is: it changes under a running process, when a memory image is cloned
"""
