"""Model options of command lines."""

from exl_exllamav2.model_init import (
    add_args,
    check_args,
    init,
    post_init_load,
    print_options,
)
