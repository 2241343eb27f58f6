"""A scaling study: one script at several sizes, what each size gained, and what it lost to which cause."""
