"""Forecasts of a series that comes with matplotlib, beside linear autoregression."""
