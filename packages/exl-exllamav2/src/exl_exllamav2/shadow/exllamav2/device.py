"""Devices: exl runs a model on one."""
