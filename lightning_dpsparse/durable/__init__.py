"""Files that survive a power cut, a kill, a full disk and a careless copy.

- `files`: folders and files that have reached the disk, and that only their owner can read.
- `locks`: a file that one process holds at a time.
- `record_log`: an append-only file of records, in which a torn or an old copy shows.
- `manifest`: size and digest of every file of a directory.
- `drafts`: a directory that appears whole under its name, or not at all.

The package uses the standard library only. What is on the disk is what `fsync` has confirmed:
everything else may be gone, or half there, after a power cut. A name is an entry of its folder, so
that a new file needs two syncs: its own and its folder's.
"""
