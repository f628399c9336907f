"""Measurements that need a GPU: scripts for a machine that is there for minutes only."""
