"""From what the user named (nothing, an id, a folder, a .gguf file) to a folder the processes can read.

``resolve`` is free of torch and takes milliseconds when the folder is there; everything slow
(download, conversion) runs in a process of its own: ``python -m worker_proc.prepare --model X``.
"""
