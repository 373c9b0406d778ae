"""The thesis's levels, one inside another, with its costs or its released code's."""
