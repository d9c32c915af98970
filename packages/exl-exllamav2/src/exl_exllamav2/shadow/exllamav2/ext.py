"""The compiled extension: importable, refused at use."""

from exl_exllamav2.refused import refuse_extension as __getattr__
