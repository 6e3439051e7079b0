"""Where Weighbridge meets other libraries, one module each; none is imported unless it is used."""
