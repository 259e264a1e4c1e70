"""Bytes in binary units."""

MIB, GIB = 2**20, 2**30
