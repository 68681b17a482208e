"""Steps between schemas of the service's database, by Alembic."""
