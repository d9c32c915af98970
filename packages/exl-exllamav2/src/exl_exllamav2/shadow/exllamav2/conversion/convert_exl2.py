"""The converter: importing or running this file converts a model."""

from exl_exllamav2.convert import run

run()
