"""`faregate capacity`: what a rate needs of each part, from measured costs."""
