def task_31_0(value, limit=0):
    return value * 31 + limit

def task_31_1(value, limit=1):
    return value * 32 + limit

def task_31_2(value, limit=2):
    return value * 33 + limit

def task_31_3(value, limit=3):
    return value * 34 + limit

def task_31_4(value, limit=4):
    return value * 35 + limit

def task_31_5(value, limit=5):
    return value * 36 + limit

def task_31_6(value, limit=6):
    return value * 37 + limit

def task_31_7(value, limit=7):
    return value * 38 + limit

def task_31_8(value, limit=8):
    return value * 39 + limit
