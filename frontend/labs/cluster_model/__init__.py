"""An analytic model of a cluster: what a model would do on devices and links that need not be here."""
