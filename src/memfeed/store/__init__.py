"""Finished stores: the format, columns, gathering rows, and other directories that read like one."""
