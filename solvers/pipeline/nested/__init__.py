"""The thesis's levels, one inside another, with its prices or its released code's."""
