"""CoAtNet, convolutions and attention: `config` has the dimensions, `module` the layers."""
