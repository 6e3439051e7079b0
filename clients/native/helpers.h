/* Threads that share a piece of work. */
#ifndef WEIGHBRIDGE_HELPERS_H
#define WEIGHBRIDGE_HELPERS_H

#define MOST_HELPERS 63

/* Call `work` in this thread and in up to `most` others, each once; they share it out among themselves. Returns when all of it is done.
 *
 * Helpers stay for a second, because starting one takes as long as copying a quarter of a megabyte. Callers at one time have some each.
 * They do not survive a fork, and the child starts its own. */
void work_together(void (*work)(void *), void *argument, int most);

#endif
