"""An adapter folded into its base's weights: y = W'x in place of y = g(Wx + sBAx) + shift, exact up to rounding."""
