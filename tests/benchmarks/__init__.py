"""Measurements that take minutes and are read by people; what is exact in them is a test as well."""
