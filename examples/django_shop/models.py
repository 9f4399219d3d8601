"""The web service's own table; Faregate's stand beside it, in the same database."""

from django.db import models


class Order(models.Model):
    key = models.CharField(max_length=100, unique=True)
    customer = models.CharField(max_length=100)
    total = models.IntegerField()

    class Meta:
        app_label = "django_shop"
