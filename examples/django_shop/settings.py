"""As few settings as the example needs; `DJANGO_SHOP_DATA` names the folder of its database."""

import os
from pathlib import Path

DATA = Path(os.environ.get("DJANGO_SHOP_DATA", "django-data"))
DATA.mkdir(parents=True, exist_ok=True)

SECRET_KEY = "for the example alone"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "examples.django_shop.views"
INSTALLED_APPS = ["examples.django_shop"]
MIDDLEWARE: list[str] = []
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "shop.db",
        # The worker writes to this file, too: a transaction that begins as a writer waits for its turn.
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 10},
    }
}
