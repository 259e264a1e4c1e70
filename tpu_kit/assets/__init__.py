"""Files shipped with tpu_kit, and the scripts that made them."""
