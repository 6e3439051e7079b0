"""Text that the demo's trainer reads."""

TEXT = """\
A weighbridge is a large scale set into the road. A lorry drives onto it empty and is weighed, is loaded, and is weighed
again on its way out. What it carries is the difference, and nobody has to unload a single sack to know.

Before there were weighbridges, goods were weighed by hand, one barrel after the other, while horses and drivers stood
waiting in the yard. The scale was honest, but it was slow, and the waiting cost more than the weighing.

The first of them hung whole carts from a beam with chains. Later a platform rested on levers below the ground, so that
a small weight on a long arm could balance a wagon of coal. Today the platform rests on load cells, and the driver reads
the number before the wheels have come to rest.

A good weighbridge does three things. It takes no longer than it must, it gives the same answer every time, and it
writes the answer down where both the one who sells and the one who buys can read it.
"""
"""Paragraphs of plain English about scales."""
