"""Faults from outside: power cuts, kills, signals, bad disks, lost hosts.

`python -m tests.faults` tries each of them many times and prints a table. The tests of this folder
try some of each.
"""
