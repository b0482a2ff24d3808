"""What a worker's memory holds and what a traffic needs, as arithmetic: without device, service or weights."""
